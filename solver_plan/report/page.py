"""A self-contained HTML page: a picture and preformatted text. No kind of problem is known here."""

from html import escape

STYLE = (
    "body { font-family: Helvetica, Arial, sans-serif; color: #222; margin: 24px; } "
    "svg { max-width: 100%; height: auto; } "
    "pre { font-size: 13px; line-height: 1.35; overflow-x: auto; }"
)


def page(title: str, picture: str | None, text: str) -> str:
    """Return a page. Title and text are escaped; the picture is SVG whose own texts are escaped already."""
    figure = "" if picture is None else f"<figure style='margin: 0'>\n{picture}</figure>\n"
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>\n"
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style></head>\n"
        f"<body>\n<h1 style='font-size: 20px'>{escape(title)}</h1>\n{figure}<pre>{escape(text)}</pre>\n"
        "</body></html>\n"
    )
