"""torch's own kernels as rows of the catalog, called through the aten operators that also return the log-sum-exp."""
