"""Selection: the catalog of kernels, what each can do, and the choice among them."""
