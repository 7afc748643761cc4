"""Writers for TensorBoard by the names that they have in Determined."""
