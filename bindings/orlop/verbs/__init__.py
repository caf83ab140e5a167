"""One module per verb of the command, each with SUMMARY, add_arguments(parser) and run(args) -> exit code."""
