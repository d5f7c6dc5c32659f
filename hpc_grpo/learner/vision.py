"""Puts the features of a microbatch's images in place of token embeddings, and computes the positions.

The features of a prompt's images are computed once for all its sequences. They replace only the prompt's own image
tokens: an image token that the policy sampled is an ordinary token.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpc_grpo.data.images import open_image
from hpc_grpo.errors import ConfigError, HpcGrpoError
from hpc_grpo.learner.packing import PackedBatch


def tower_parameters(language_model: Any) -> Iterator[nn.Parameter]:
    """Yield the parameters of the vision tower, and of its connector to the decoder; none for a model of text alone."""
    if language_model.config.get_text_config() is not language_model.config:
        of_decoder = {id(own) for own in language_model.get_decoder().parameters()}
        yield from (own for own in language_model.base_model.parameters() if id(own) not in of_decoder)


class Vision:
    """Makes the inputs of a model's decoder. It uses the model's parameters and has no parameters of its own."""

    def __init__(self, language_model: Any, source: str, *, trains: bool) -> None:
        """`trains`: the tower is trained. Raises ConfigError if the model has no image processor."""
        from transformers import AutoImageProcessor

        self._model, self.decoder, self._trains = language_model.base_model, language_model.get_decoder(), trains
        self._image_token = language_model.config.image_token_id
        try:
            self._processor = AutoImageProcessor.from_pretrained(language_model.name_or_path, trust_remote_code=False)
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(f"{source} has no image processor that can be loaded: {error}") from error
        self._taken = inspect.signature(inspect.unwrap(self._model.get_image_features)).parameters.keys()
        self._is_sharded = any(hasattr(own, "ds_id") for own in language_model.parameters())

    def inputs(self, batch: PackedBatch) -> dict[str, Tensor]:
        """Return embeddings `[1, T, D]` and positions: `[1, T]`, or `[4, 1, T]` (text, time, height, width)."""
        embeddings = self._model.get_input_embeddings()(batch.input_ids.unsqueeze(0))
        positions = batch.position_ids.unsqueeze(0)
        images = [image for prompt in batch.prompts_with_images for image in prompt.images]
        has_grids = hasattr(self._model, "get_rope_index")
        without = positions.expand(4, 1, -1) if has_grids else positions
        if not images and not self._trains and not self._is_sharded:
            return {"inputs_embeds": embeddings, "position_ids": without}
        # ZeRO expects the same modules in every microbatch of every rank. Without images, compute a blank image.
        processed = self._processed(images)
        taken = {name: own.to(embeddings.device) for name, own in processed.items() if name in self._taken}
        with torch.set_grad_enabled(torch.is_grad_enabled() and self._trains):
            of_images = self._model.get_image_features(**taken, return_dict=True).pooler_output
            features = torch.cat([own.reshape(-1, embeddings.shape[-1]) for own in of_images]).to(embeddings.dtype)
        if not images:
            return {"inputs_embeds": embeddings + 0.0 * features.sum(), "position_ids": without}
        rows = np.full(batch.input_ids.shape[0], -1, np.int64)
        first = 0
        for prompt in batch.prompts_with_images:
            parts = np.flatnonzero(prompt.token_ids == self._image_token)
            for places in prompt.places:
                rows[places[parts]] = np.arange(first, first + len(parts))
            first += len(parts)
        if first != len(features):
            raise HpcGrpoError(
                f"The engine gave {first} tokens to images, and the learner computed {len(features)} features: their "
                f"processors differ. Use the same versions of transformers and Pillow on all nodes."
            )
        of_tokens = torch.from_numpy(rows).to(embeddings.device)
        shown = features.index_select(0, of_tokens.clamp(min=0)).unsqueeze(0)
        embeddings = torch.where((of_tokens >= 0).view(1, -1, 1), shown, embeddings)
        if has_grids:
            positions = torch.cat([positions[None], self._positions(batch, processed["image_grid_thw"])])
        return {"inputs_embeds": embeddings, "position_ids": positions}

    def _processed(self, images: Sequence[bytes]) -> Mapping[str, Tensor]:
        from PIL import Image

        opened = [open_image(image) for image in images] or [Image.new("RGB", (56, 56))]
        return self._processor([opened], return_tensors="pt")  # type: ignore[no-any-return]

    def _positions(self, batch: PackedBatch, grids: Tensor) -> Tensor:
        """Return the positions of time, height and width `[3, 1, T]`; they begin at 0 in each sequence."""
        positions = batch.position_ids.cpu().expand(3, 1, -1).clone()
        first = 0
        for prompt in batch.prompts_with_images:
            ids = torch.from_numpy(prompt.token_ids.astype(np.int64))[None]
            own_grids = grids[first : first + len(prompt.images)]
            is_image = (ids == self._image_token).int()
            own, delta = self._model.get_rope_index(ids, is_image, image_grid_thw=own_grids)
            for places in prompt.places:
                after = torch.arange(len(prompt.token_ids), len(places)) + int(delta)
                positions[:, 0, places] = torch.cat([own[:, 0], after.expand(3, -1)], dim=1)
            first += len(prompt.images)
        return positions.to(batch.position_ids.device)
