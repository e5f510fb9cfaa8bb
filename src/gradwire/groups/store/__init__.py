"""Rendezvous stores: where ranks meet before they have a group."""
