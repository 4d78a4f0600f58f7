"""What is tried inside the environments of the wheels; see gather.py.

These modules are imported by the tests as well, for the names in their tables, so none imports vLLM or
the plugin before a scenario runs.
"""
