"""The four kinds of autograd hook, and the rules of calling them."""
