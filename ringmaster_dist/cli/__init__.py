"""The command line: a table of commands, a parser, and the modules of the commands. Only entry points import it."""
