"""plato's callbacks, at the paths from which its users import them."""
