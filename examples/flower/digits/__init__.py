"""Handwritten digits, learned by the clients of a Flower federation."""
