"""The container image: the versions that go together, its Dockerfile, its build and its self-test."""
