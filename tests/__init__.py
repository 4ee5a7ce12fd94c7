"""The tests: a package, because other installed packages have a folder "tests", too."""
