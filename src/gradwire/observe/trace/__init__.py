"""A run as a picture: tracks of all ranks in Chrome's JSON format."""
