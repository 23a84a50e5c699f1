"""Prompts of published chat templates over the grid of tests/chat/conversations.py, as digests.

    python tools/make_prompt_goldens.py FOLDER

FOLDER holds the templates as their makers published them, as `<renderer>.jinja`. They stay outside of this repository;
what is kept is a digest of each template, and one of its prompts for each conversation.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from arriero.chat.templates import ChatTemplates  # noqa: E402
from tests.chat.conversations import GRID, prompts_of  # noqa: E402

GOLDENS = ROOT / "tests" / "chat" / "fixtures" / "prompts.json"


def main(folder: Path) -> None:
    """Write the digests of every template in the folder; those of others stay as they are."""
    goldens = json.loads(GOLDENS.read_text("utf-8")) if GOLDENS.exists() else {}
    for path in sorted(folder.glob("*.jinja")):
        source = path.read_text("utf-8")
        templates = ChatTemplates({"default": source})
        goldens[path.stem] = {
            "template": hashlib.sha256(source.encode()).hexdigest(),
            "prompts": {name: prompts_of(templates, path.stem, name) for name in GRID},
        }
    GOLDENS.write_text(json.dumps(goldens, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
