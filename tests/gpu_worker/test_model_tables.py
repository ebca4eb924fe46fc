"""docs/models.md shows the numbers that the code computes, for shapes whose parameter counts are published."""

from __future__ import annotations

from scripts import model_tables


def test_shapes_have_the_published_parameter_counts() -> None:
    counts = {
        config.name: model_tables.num_parameters(config) for config in model_tables.published()
    }
    assert counts["Ouro-1.4B"] == 1_434_652_673
    assert counts["Ouro-2.6B"] == 2_667_974_657
    assert counts["Huginn-0125"] == 3_564_976_800


def test_the_page_shows_the_computed_tables() -> None:
    doc = model_tables.DOC.read_text(encoding="utf-8")
    assert "**Ouro-1.4B** at 4 loops" in doc and doc == model_tables.written(doc), (
        "run scripts/model_tables.py --write"
    )


def test_known_sizes() -> None:
    """768 KiB per token of Ouro 1.4B and 132 slots of 2 x 5,280 fp16 values for Huginn at 32 loops."""
    text = model_tables.tables()
    assert f"| `fp16` | {768 * 1024:,} |" in text
    assert f"| `fp16` | {132 * 2 * 5280 * 2:,} |" in text
