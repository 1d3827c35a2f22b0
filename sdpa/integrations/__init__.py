"""Other libraries' models with our attention; each module is imported by who uses its library."""
