"""Attention that models write out, found in the graphs that Inductor compiles and put on our operator."""
