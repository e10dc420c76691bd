"""Every model type of the installed transformers: what serving a tiny model of it would do, and whether its numbers are right.

tf-backend zoo                      # plans of all
tf-backend zoo llama --level numbers

In: the tables of transformers. Out: rows, on screen, as files, and recorded beside the package. See `tf_backend.zoo.run.find_out`.
"""
