"""Modules of Determined about TensorBoard."""
