"""Bar charts as SVG text: the same numbers give the same bytes, so that a test can tell a stale chart."""

from html import escape


_WIDTH, _LABEL, _VALUE, _BAR, _GAP = 760, 250, 110, 22, 10
# Readable on the site's light and dark pages.
_TEXT, _FILL, _ACCENT = "#7a7a7a", "#8fa3bf", "#3f6fd8"


def bar_chart(title: str, unit: str, bars: list[tuple[str, float]], accent: str = "") -> str:
    """Draw horizontal bars on one scale from zero.

    Args:
        title (`str`): What is compared.
        unit (`str`): Of the values.
        bars (`list[tuple[str, float]]`): Labels and positive values, drawn from top to bottom.
        accent (`str`): Bars whose label begins with this stand out.

    Raises:
        ValueError: If there is nothing to draw.
    """
    if not bars or min(value for _, value in bars) <= 0:
        raise ValueError(f"A chart needs bars of positive values, got {bars}.")
    scale = (_WIDTH - _LABEL - _VALUE) / max(value for _, value in bars)
    height = 40 + len(bars) * (_BAR + _GAP)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'font-family="sans-serif" font-size="14" fill="{_TEXT}">',
        f"<title>{escape(title)}</title>",
        f'<text x="0" y="18" font-weight="bold">{escape(title)} ({escape(unit)})</text>',
    ]
    for index, (label, value) in enumerate(bars):
        top, middle = 34 + index * (_BAR + _GAP), 34 + index * (_BAR + _GAP) + 16
        color = _ACCENT if accent and label.startswith(accent) else _FILL
        lines += [
            f'<text x="{_LABEL - 10}" y="{middle}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{_LABEL}" y="{top}" width="{value * scale:.1f}" height="{_BAR}" fill="{color}"/>',
            f'<text x="{_LABEL + value * scale + 8:.1f}" y="{middle}">{value:.3g}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])
