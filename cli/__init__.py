"""The `kvrt` command line: parse, call kvrt, print."""
