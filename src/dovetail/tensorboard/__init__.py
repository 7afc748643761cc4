"""TensorBoard modules, at the paths that they have in Determined."""
