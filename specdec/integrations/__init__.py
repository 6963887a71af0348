"""Ways into other libraries."""
