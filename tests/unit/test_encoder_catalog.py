"""The encoders that pipelines load: all of them are in the catalog, or stay whole for a reason."""

from __future__ import annotations

import torch

from vitrail.plan.probe import inputs_for


def test_masks_as_tokenizers_make_them() -> None:
    made = inputs_for({"end": "padded[batch, text]", "front": "left[batch, text]"}, {"batch": 3, "text": 5})
    assert made["end"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert made["front"].tolist() == [[1, 1, 1, 1, 1], [0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]
    assert made["end"].dtype == torch.int64
    (single,) = inputs_for({"mask": "padded[1, text]"}, {"text": 1})["mask"].tolist()
    assert single == [1]
