"""A run as one self-contained HTML page: read a report, draw its charts, write the page."""
