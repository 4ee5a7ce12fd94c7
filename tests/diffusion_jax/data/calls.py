"""Call commands in this process."""


def exit_code(main, *arguments):
    """Call the `main` function of a command, and return its exit code."""
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as ended:
        return ended.code
    return 0
