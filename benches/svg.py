# SPDX-License-Identifier: MIT
"""Small plots as SVG text: bars, and lines over time in panels. Standard library only."""

import html
import math

COLOURS = ("#1f5fa8", "#c8551b", "#3b8a3e", "#7a4a9e", "#8a6d1f")
STYLE = "font-family='sans-serif' font-size='12' fill='#222'"


def steps(most):
    """Round numbers from 0 to at least `most`, about four of them."""
    raw = max(most, 1e-9) / 4
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * f for f in (1, 2, 2.5, 5, 10) if unit * f >= raw)
    return [i * step for i in range(math.ceil(most / step - 1e-9) + 1)]


def text(x, y, words, anchor="start", more=""):
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' {more}>{html.escape(str(words))}</text>"


def line(x1, y1, x2, y2, more="stroke='#ccc'"):
    return f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' {more}/>"


def write(path, width, height, parts):
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}' {STYLE}>"
    back = f"<rect width='{width}' height='{height}' fill='#fff'/>"
    path.write_text("\n".join([head, back, *parts, "</svg>"]) + "\n")


def grid(parts, left, top, width, height, most):
    """The value axis; returns the function from value to y."""
    marks = steps(most)

    def y(value):
        return top + height * (1 - value / marks[-1])

    for mark in marks:
        parts.append(line(left, y(mark), left + width, y(mark)))
        parts.append(text(left - 6, y(mark) + 4, f"{mark:g}", "end"))
    return y


def write_bars(path, title, bars, bounds):
    """bars: [(name, value)], in as many groups as there are bounds: [(words, value)], a dashed line over
    each group."""
    left, top, width, height = 50, 40, 100 * len(bars), 220
    parts = [text(left, 22, title, more="font-weight='bold'")]
    y = grid(parts, left, top, width, height, max(v for _, v in [*bars, *bounds]))
    each = width / len(bars)
    group = len(bars) // len(bounds)
    for i, (name, value) in enumerate(bars):
        x = left + i * each + each * 0.15
        parts.append(
            f"<rect x='{x:.1f}' y='{y(value):.1f}' width='{each * 0.7:.1f}' height='{top + height - y(value):.1f}' "
            f"fill='{COLOURS[i % group % len(COLOURS)]}'/>"
        )
        parts.append(text(x + each * 0.35, y(value) + 14, f"{value:.1f}", "middle", "fill='#fff'"))
        parts.append(text(x + each * 0.35, top + height + 18, name, "middle"))
    for i, (words, value) in enumerate(bounds):
        begin, end = left + i * group * each, left + (i + 1) * group * each
        parts.append(line(begin, y(value), end, y(value), "stroke='#222' stroke-dasharray='5 4'"))
        parts.append(text(end - 4, y(value) - 4, words, "end"))
    write(path, left + width + 20, top + height + 30, parts)


def write_lines(path, title, panels):
    """panels: [(name, [(line's name, [(x, y)])], (bound's words, bound))], one below the other."""
    left, top, width, height, gap = 50, 60, 760, 150, 46
    parts = [text(left, 22, title, more="font-weight='bold'")]
    for i, (name, _) in enumerate(panels[0][1]):
        parts.append(line(left + i * 90, 38, left + i * 90 + 20, 38, f"stroke='{COLOURS[i]}' stroke-width='3'"))
        parts.append(text(left + i * 90 + 26, 42, name))
    for number, (name, lines, (words, bound)) in enumerate(panels):
        at = top + number * (height + gap)
        y = grid(parts, left, at, width, height, bound)
        end = max([points[-1][0] for _, points in lines if points] + [1e-9])
        for mark in steps(end):
            if mark <= end:
                parts.append(text(left + width * mark / end, at + height + 16, f"{mark:g}", "middle"))
        for i, (_, points) in enumerate(lines):
            walk = " ".join(f"{left + width * px / end:.1f},{y(py):.1f}" for px, py in points)
            parts.append(f"<polyline fill='none' stroke='{COLOURS[i]}' stroke-width='1.5' points='{walk}'/>")
        parts.append(line(left, y(bound), left + width, y(bound), "stroke='#222' stroke-dasharray='5 4'"))
        parts.append(text(left + width, y(bound) - 4, words, "end"))
        parts.append(text(left + 4, at + 14, name, more="font-weight='bold'"))
    write(path, left + width + 20, top + len(panels) * (height + gap), parts)
