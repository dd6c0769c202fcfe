"""Which optional packages are here, and what to install when they are not."""

import importlib.util


def missing(extra: str, *packages: str) -> str | None:
    """One line that says which of `packages` are missing and how to get them; None when all are here.

    Example:
      >>> missing("viz", "math") is None
      True
      >>> missing("viz", "no_such_package")
      "no_such_package is missing. Install it: pip install 'jaxmoe[viz]'"
    """
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    if not absent:
        return None
    verb = "is missing. Install it" if len(absent) == 1 else "are missing. Install them"
    return f"{', '.join(absent)} {verb}: pip install 'jaxmoe[{extra}]'"
