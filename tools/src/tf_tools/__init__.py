"""Tools that the tests and the maintainers of tf-backend use."""
