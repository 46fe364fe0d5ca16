"""What the command line answers, from running it."""

import os
import subprocess
import sys
import tempfile


_COLUMNS = 100


def transcript(arguments: list[str], stream: str = "stdout") -> str:
    """Run ``diffusers-h3`` with `arguments` as a new user's shell would, offline, and return what it printed.

    Args:
        arguments (`list[str]`): The command line.
        stream (`str`): Which output is shown: `"stdout"`, or `"stderr"` for the message of an error.
    """
    with tempfile.TemporaryDirectory() as home:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DIFFUSERS_H3_")}
        environment |= {
            "COLUMNS": str(_COLUMNS),
            "NO_COLOR": "1",
            "PYTHONUTF8": "1",
            "TERM": "dumb",
            "HF_HOME": home,
            "HF_HUB_OFFLINE": "1",
        }
        environment.pop("HF_HUB_CACHE", None)
        done = subprocess.run(
            [sys.executable, "-m", "diffusers_h3", *arguments],
            capture_output=True,
            encoding="utf-8",
            timeout=120,
            env=environment,
            check=False,
        )
        text = getattr(done, stream).replace(home, "~/.cache/huggingface")
    if stream == "stderr":
        # Libraries may warn while they are imported; the message is what comes last.
        text = text[text.index("error:") :]
    lines = "\n".join(line.rstrip() for line in text.strip("\n").splitlines())
    shown = " ".join(f'"{word}"' if " " in word else word for word in arguments)
    code = f"\n[exit code {done.returncode}]" if done.returncode else ""
    return f"```console\n$ diffusers-h3 {shown}\n{lines}{code}\n```"
