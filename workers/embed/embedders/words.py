"""Words of a text, whatever its script; where one may be cut from the next.

Chinese and Japanese put no spaces between words, so each of their characters counts as one.
"""

import re

# Kana, Han and their punctuation, compatibility forms, halfwidth and fullwidth forms.
UNSPACED = "\u2e80-\u303f\u3040-\u30ff\u3100-\u312f\u3400-\u9fff\uf900-\ufaff\uff00-\uffef"
RUN_CHARS_MAX = 200  # what has no space for longer is no word: a key, or an encoded file
PARTS = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]{{1,{RUN_CHARS_MAX}}}")
TOKENS = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+|[^\w\s]")
