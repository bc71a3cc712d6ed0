"""Prints each chat template of TRL's package, and what transformers renders of conversations with it, as one line of JSON:
{NAME: {"source": TEXT, "rendered": {CONVERSATION: TEXT or null}}}. Null: it raises an error. The date is that of docs/data.md.

    chat_templates.py CONVERSATIONS.json     (CONVERSATIONS.json: lists of messages by name)
"""

import datetime
import json
import sys
from pathlib import Path

import trl
from jinja2.exceptions import TemplateError
from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import render_jinja_template

SPECIALS = dict(bos_token="<|bos|>", eos_token="<|eos|>", pad_token="<|pad|>")


class Then(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2024, 7, 26)


chat_template_utils.datetime = Then


def rendered(source, messages):
    try:
        texts, _ = render_jinja_template(conversations=[messages], chat_template=source, **SPECIALS)
    except (TemplateError, TypeError):
        return None
    return texts[0]


conversations = json.loads(Path(sys.argv[1]).read_text())
found = {}
for path in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja")):
    source = path.read_text()
    texts = {name: rendered(source, messages) for name, messages in conversations.items()}
    found[path.stem] = dict(source=source, rendered=texts)
print(json.dumps(found))
