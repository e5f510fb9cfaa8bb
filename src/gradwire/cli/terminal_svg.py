"""Terminal output as a picture: an SVG file that loads nothing. rich's own format loads fonts from another host."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType

_ASPECT = 0.602
"""Width over height of a character of the fonts below."""
_FORMAT = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font: {char_height}px DejaVu Sans Mono, Menlo, Consolas, monospace }}
.{unique_id}-title {{ font: bold 18px DejaVu Sans, Helvetica, Arial, sans-serif }}
{styles}
</style>
<defs>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def terminal_svg(*parts: RenderableType, title: str) -> str:
    """What a terminal of 80 columns would show of `parts`, as SVG."""
    console = Console(
        file=io.StringIO(),
        width=80,
        record=True,
        force_terminal=True,
        color_system="truecolor",
        highlight=False,
        legacy_windows=False,
    )
    for part in parts:
        console.print(part)
    drawn = console.export_svg(title=title, code_format=_FORMAT, font_aspect_ratio=_ASPECT, unique_id="t")
    return drawn.replace("</text><text", "</text>\n<text")
