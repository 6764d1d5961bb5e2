"""Tasks on photographs and CIFAR-10: networks, crops, folders, the hub, threads."""

import shutil
import sys
import threading
from itertools import count, islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from mkor_bench.data.cifar10 import MEAN, STD, load_cifar10, normalised
from mkor_bench.data.photographs import load_photographs
from mkor_bench.data.store import BLANK, HUB
from mkor_bench.errors import UserError
from mkor_bench.models.alexnet import alexnet
from mkor_bench.tasks import photographs
from mkor_bench.tasks.photographs import ahead, central, cropped
from mkor_bench.tasks.source import TaskSource
from small_data import TEST, TRAIN, write_small_data
from streams import Stream


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_small_data(tmp_path_factory.mktemp("data"))


def plain(colour, size=(40, 30)):
    return Image.new("RGB", size, colour)


def test_alexnet_has_more_than_twenty_million_parameters():
    with torch.device("meta"):
        model = alexnet(100)
    assert sum(p.numel() for p in model.parameters()) == 20_694_948
    assert model(torch.empty(2, 3, 32, 32, device="meta")).shape == (2, 100)


def test_resnet_50_is_that_of_the_paper():
    pytest.importorskip("transformers", reason="needs the package transformers")
    from mkor_bench.models.resnet50 import ResNet50

    with torch.device("meta"):
        model, small = ResNet50(1000), ResNet50(10, small=True)
        assert model(torch.empty(2, 3, 64, 64)).shape == (2, 1000)
        assert small(torch.empty(2, 3, 32, 32)).shape == (2, 10)
    assert sum(p.numel() for p in model.parameters()) == 25_557_032
    # The last feature map of a small image has 4 by 4 places, as in ResNet-20's kind.
    seen = []
    stages = small.network.resnet.encoder
    handle = stages.register_forward_hook(lambda m, i, out: seen.append(out.last_hidden_state))
    small(torch.empty(2, 3, 32, 32, device="meta"))
    handle.remove()
    assert seen[0].shape == (2, 2048, 4, 4)


def test_cifar10_is_read_as_it_lies_there(folder):
    cifar = load_cifar10(folder)
    assert cifar.train.images.shape == (TRAIN, 3, 32, 32) and len(cifar.test.labels) == TEST
    stored = np.load(folder / "cifar10/train.npz")
    pixels = torch.from_numpy(stored["images"][5]).permute(2, 0, 1).float() / 255
    assert torch.equal(cifar.train.images[5], pixels)
    assert cifar.train.labels.tolist() == stored["labels"].tolist()


def test_cifar10_of_another_shape_is_told(tmp_path):
    (tmp_path / "cifar10").mkdir()
    for name in ("train", "test"):
        images, labels = np.zeros((3, 28, 28), np.uint8), np.arange(3)
        np.savez(tmp_path / f"cifar10/{name}.npz", images=images, labels=labels)
    with pytest.raises(
        UserError, match=r"train.npz' is not as documented \(images are uint8 \[3, 28, 28\]\): im"
    ):
        load_cifar10(tmp_path)


def test_cifar10_comes_from_the_hub(monkeypatch):
    def stored(path, name, split):
        assert (path, name) == ("uoft-cs/cifar10", None)
        return {"img": [plain((255, 0, 0), (32, 32))], "label": [3]}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=stored))
    cifar = load_cifar10(HUB)
    load_cifar10.cache_clear()
    assert cifar.train.images[0, :, 7, 9].tolist() == [1, 0, 0]
    assert cifar.test.labels.tolist() == [3]


def test_cifar10_is_standardised_by_its_own_figures():
    flat = torch.tensor(MEAN).view(1, 3, 1, 1).expand(2, 3, 32, 32)
    higher = flat + 2 * torch.tensor(STD).view(3, 1, 1)
    torch.testing.assert_close(normalised(higher), torch.full((2, 3, 32, 32), 2.0))


BLANKS = {
    "mnist-convnet": (1, 28, 28),
    "cifar10-resnet20": (3, 32, 32),
    "cifar100-convnet": (3, 32, 32),
    "cifar100-alexnet": (3, 32, 32),
    "imagenet-resnet50": (3, 224, 224),
}


@pytest.mark.parametrize("name", BLANKS)
def test_made_up_images_have_the_shapes_of_real_ones(name):
    if name.endswith("resnet50"):
        pytest.importorskip("transformers", reason="needs the package transformers")
    task = TaskSource(name, BLANK).load()
    images, labels = next(task.batches(0))
    assert images.shape[1:] == BLANKS[name] and len(labels) == len(images)


def test_cifar10_without_its_folder_is_told(tmp_path):
    with pytest.raises(UserError, match=r"lacks cifar10/train.npz .* fetch the original with --d"):
        load_cifar10(tmp_path)


def gradient():
    """An image whose red is the column and whose green is the row."""
    column, row = np.meshgrid(np.arange(200), np.arange(120))
    return Image.fromarray(np.stack([column, row, 0 * row], axis=2).astype(np.uint8))


def pixels_of(crop):
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (photographs.MEAN, photographs.STD))
    return 255 * (crop * std + mean)


def test_a_central_crop_is_the_middle():
    shown = pixels_of(central(gradient(), 35))
    kept = 120 * 224 / 256
    step = kept / 35
    assert shown[0, 17, 17].item() == pytest.approx(99.5, abs=1)
    assert shown[1, 17, 17].item() == pytest.approx(59.5, abs=1)
    assert (shown[0, 0, 34] - shown[0, 0, 0]).item() == pytest.approx(34 * step, abs=3)


def test_random_crops_are_parts_of_the_usual_sizes_mirrored_or_not():
    image, mirrored = gradient(), 0
    for seed in range(200):
        shown = pixels_of(cropped(image, seed, 32))
        wide = (shown[0, 0, 31] - shown[0, 0, 0]).item() * 32 / 31
        high = (shown[1, 31, 0] - shown[1, 0, 0]).item() * 32 / 31
        mirrored += wide < 0
        assert 0.06 < abs(wide) * high / (200 * 120) < 1.01
        assert 0.70 < abs(wide) / high < 1.43
        assert torch.equal(cropped(image, seed, 32), cropped(image, seed, 32))
    assert 70 < mirrored < 130


def test_a_photograph_too_narrow_for_a_crop_gives_its_middle():
    narrow = plain((9, 9, 9), (2000, 3))
    assert cropped(narrow, 0, 8).shape == (3, 8, 8)
    assert torch.equal(cropped(narrow, 0, 8), central(narrow, 8))


def test_threads_keep_the_order_and_stay_little_ahead():
    begun = []

    def double(item):
        begun.append(item)
        return 2 * item

    stream = ahead(double, count())
    assert list(islice(stream, 50)) == list(range(0, 100, 2))
    stream.close()
    assert len(begun) <= 50 + 4 * 64
    assert not [thread for thread in threading.enumerate() if "ThreadPool" in thread.name]


def test_an_error_in_a_thread_is_raised_where_its_result_is_asked_for():
    stream = ahead(lambda item: 1 / item, [2, 1, 0])
    assert [next(stream), next(stream)] == [0.5, 1]
    with pytest.raises(ZeroDivisionError):
        next(stream)


def test_photographs_are_read_from_folders_that_are_their_classes(folder):
    data = load_photographs(folder)
    assert data.classes == 3
    labels = [label for _, label in data.test()]
    assert labels == [0] * 4 + [1] * 4 + [2] * 4
    epoch = [label for _, label in islice(data.train(0), 24)]
    assert sorted(epoch) == [0] * 8 + [1] * 8 + [2] * 8 and epoch != sorted(epoch)
    opener, label = next(data.train(0))
    assert np.asarray(opener()).mean((0, 1)).argmax() == [2, 1, 0][label]


def test_photographs_that_are_missing_or_damaged_are_named(tmp_path):
    with pytest.raises(UserError, match=r"imagenet' lacks photographs in train/CLASS: name a dat"):
        load_photographs(tmp_path)
    for part, name in (("train", "a"), ("val", "b")):
        (tmp_path / "imagenet" / part / name).mkdir(parents=True)
        (tmp_path / "imagenet" / part / name / "1.jpg").write_bytes(b"no photograph")
    with pytest.raises(UserError, match=r"val' has a class 'b' that train lacks"):
        load_photographs(tmp_path)
    (tmp_path / "imagenet/train/b").mkdir()
    opener, _ = next(load_photographs(tmp_path).train(0))
    with pytest.raises(UserError, match=r"1.jpg' cannot be read .*: it must be a photograph"):
        opener()


def test_only_photographs_of_a_folder_are_read(folder, tmp_path):
    shutil.copytree(folder / "imagenet", tmp_path / "imagenet")
    (tmp_path / "imagenet/train/red/.DS_Store").write_bytes(b"")
    (tmp_path / "imagenet/train/red/0.png").rename(tmp_path / "imagenet/train/red/0.PNG")
    epoch = list(islice(load_photographs(tmp_path).train(0), 24))
    assert sorted(label for _, label in epoch) == [0] * 8 + [1] * 8 + [2] * 8
    assert all(opener().mode == "RGB" for opener, _ in epoch)


def test_the_hub_streams_photographs_epoch_after_epoch(monkeypatch):
    stream = Stream({"image": plain((row, 0, 0)), "label": row} for row in range(3))
    asked = []

    def stored(path, name, **options):
        asked.append((path, options))
        return stream

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=stored))
    data = load_photographs(HUB)
    load_photographs.cache_clear()
    assert asked[0] == ("ILSVRC/imagenet-1k", {"split": "train", "streaming": True})
    assert [label for _, label in islice(data.train(5), 7)] == [0, 1, 2, 0, 1, 2, 0]
    assert stream.seed == 5 and stream.epochs == [0, 1, 2]
    assert [label for _, label in data.test()] == [0, 1, 2]
