"""What Markdown says."""

import pytest

from streams.parsing.markdown import markdown


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("| Key | Value |\n|---|---|\n| a | first<br>second<br/>third |\n| | x |",
         "Key | Value\na | first second third\n| x"),
        ("12 euro<br>with card", "12 euro\nwith card"),
        ("About 10<sup>6</sup> rows.", "About 10^6 rows."),
        ("---\nThe first paragraph.\n---\n\nSecond.", "## The first paragraph.\n\nSecond."),
        ("---\n\nA letter.\n\n---\nEnd", "A letter.\n\nEnd"),
        ("Use the <title> tag.\n\nMore, <b>bold</b>", "Use the <title> tag.\n\nMore, bold"),
        ("Use <template> here, <nav>, an <object>.\n\n<rt> More",
         "Use <template> here, <nav>, an <object>.\n\n<rt> More"),
        ("<nav>\n\n[x](y)\n\n</nav>\n\nafter", "after"),
        ("<script>\nx\n</script>\n\nafter", "after"),
        ("<table><tr><td>\n\n**a**\n\n</td><td>b</td></tr></table>", "a | b"),
        ("~~gone~~ `a <b>` ![alt](x.png)", "gone a <b> alt"),
        ("3. three\n4. four\n   - x\n", "3. three\n4. four\n- x"),
        ("````\n```\nx\n```\n````", "````\n```\nx\n```\n````"),
    ],
)  # fmt: skip
def test_markdown_reads_like_its_rendered_page(source: str, expected: str) -> None:
    assert markdown(source.encode()).text == expected


@pytest.mark.parametrize(
    ("front", "title", "facts"),
    [
        ("---\ntitle: >\n  A folded\n  one\ntags: [a, b]\ndate: 2020-01-02\n---\n", "A folded one",
         {"tags": ["a", "b"], "date": "2020-01-02"}),
        ('---\ntitle: "Boats"\nlayout: x\n...\n', "Boats", {}),
        ("+++\ntitle = 'T'\ntags = ['x', 7]\ndate = 2020-01-02T10:00:00Z\n+++\n", "T",
         {"tags": ["x", "7"], "date": "2020-01-02T10:00:00+00:00"}),
        ("---\ntitle: 1.10\ntags: [3.10, on, 12:30, ~]\n---\n", "1.10",
         {"tags": ["3.10", "on", "12:30"]}),
        ("+++\ntitle = 1.10\ntags = [3.10, true]\n+++\n", "1.10", {"tags": ["3.10", "true"]}),
    ],
)  # fmt: skip
def test_markdown_reads_front_matter_in_yaml_and_toml(
    front: str, title: str, facts: dict[str, object]
) -> None:
    document = markdown(front.encode() + b"\nText.")
    assert (document.title, document.metadata, document.text) == (title, facts, "Text.")


def test_markdown_ignores_front_matter_with_exponential_aliases() -> None:
    """Expanded, its aliases would make 10**30 texts."""
    lists = ["a0: &a0 [x, x]"] + [
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30)
    ]
    front = "\n".join(["---", *lists, "tags: *a29", "title: T", "---", ""])
    document = markdown(front.encode() + b"Text.")
    assert (document.title, document.metadata, document.text) == ("T", {}, "Text.")
