"""Write the drawings of docs/drawings/ to docs/pictures/: python docs/draw.py"""

from pathlib import Path

from drawings import decoding, loop, maps, rules, training

FOLDER = Path(__file__).parent / "pictures"
PICTURES = loop.PICTURES | training.PICTURES | rules.PICTURES | decoding.PICTURES | maps.PICTURES


def main() -> None:
    """Write every picture, and print its name."""
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg())
        print(f"docs/pictures/{name}.svg")


if __name__ == "__main__":
    main()
