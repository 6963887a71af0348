"""A checkpoint's tensors, read as they are asked for: whatever the format, by the parts of a decoder."""
