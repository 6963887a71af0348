"""Runs the uses of one client, in its own environment: a line of JSON for each, with its error."""

import importlib
import json
import sys
import warnings

warnings.simplefilter("ignore")
uses = importlib.import_module(sys.argv[1])
for name in [name for name in vars(uses) if name.startswith("use_")]:
    try:
        getattr(uses, name)()
        error = ""
    except Exception as failed:
        error = f"{type(failed).__name__}: {failed}"[:300]
    print(json.dumps([name.removeprefix("use_").replace("_", " "), error]), flush=True)
