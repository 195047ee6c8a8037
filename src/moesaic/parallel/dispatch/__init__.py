"""One dispatcher a file."""
