"""`sign`: one bit per element."""


def sign(): ...
