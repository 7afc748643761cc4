"""TensorBoard writers, at the paths that they have in Determined."""
