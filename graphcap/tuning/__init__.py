"""Finds the layer plans of a model on the device at hand, by measuring whole captured steps."""
