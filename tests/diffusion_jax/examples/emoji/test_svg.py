"""Entities in SVG files can neither fill the memory nor read other files."""

import pytest

resvg_py = pytest.importorskip("resvg_py")
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="8" height="8"><text>&{};</text></svg>'


def entities():
    """Yield entities, each ten times as long as the previous one, up to ten gigabytes."""
    names = "abcdefghij"
    yield '<!ENTITY a "aaaaaaaaaa">'
    for name, before in zip(names[1:], names, strict=False):
        yield f'<!ENTITY {name} "{f"&{before};" * 10}">'


@pytest.mark.parametrize(
    ("declared", "used", "message"),
    [
        ("".join(entities()), "j", "entity reference loop"),
        ('<!ENTITY z SYSTEM "file:///etc/passwd">', "z", "unknown entity reference"),
    ],
)
def test_svg_files_with_harmful_entities_are_errors(declared, used, message):
    with pytest.raises(ValueError, match=message):
        text = f"<!DOCTYPE x [{declared}]>{SVG.format(used)}"
        resvg_py.svg_to_bytes(svg_string=text, width=8, height=8)
