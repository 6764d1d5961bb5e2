"""The snippets of docs/frameworks.md run as they are printed."""

import pytest
import torch

from integrations.common import sentences, tiny
from test_snippets import run, snippet

transformers = pytest.importorskip("transformers")

# Lightning on how it runs here.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]


def arguments(folder, **options):
    return transformers.TrainingArguments(
        folder, max_steps=3, save_steps=2, report_to=[], use_cpu=True, **options
    )


def trainer_names(folder):
    return {
        "model": tiny(),
        "args": arguments(folder),
        "data": sentences(12),
        "Trainer": transformers.Trainer,
    }


def test_the_trainer_of_the_page_trains_and_resumes(tmp_path):
    text = snippet("frameworks.md", "trainer = Trainer(")
    names = run(text, **trainer_names(tmp_path))
    seen = names["trainer"].optimizer.optimizer
    assert any(info.updates for info in seen.layers())
    resumed = run(
        text.replace("train()", "train(resume_from_checkpoint=True)"), **trainer_names(tmp_path)
    )
    for own, other in zip(resumed["model"].parameters(), names["model"].parameters(), strict=True):
        assert torch.equal(own, other)


def test_the_factory_of_the_page_around_another_optimizer(tmp_path):
    from mkor.integrations.huggingface import optimizer_factory

    text = snippet("frameworks.md", "def base(groups)")
    text = text.replace("optimizer_factory(mkor", "made = optimizer_factory(mkor")
    names = run(text, args=arguments(tmp_path), optimizer_factory=optimizer_factory)
    trainer = transformers.Trainer(
        tiny(),
        arguments(tmp_path),
        train_dataset=sentences(12),
        optimizer_cls_and_kwargs=names["made"],
    )
    trainer.train()
    assert {group["weight_decay"] for group in trainer.optimizer.param_groups} == {0.0, 0.01}


def test_the_loop_of_the_page_with_accelerate():
    accelerate = pytest.importorskip("accelerate")
    model = tiny()
    names = run(
        snippet("frameworks.md", "accelerator.accumulate"),
        model=model,
        accelerator=accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True),
        loader=torch.utils.data.DataLoader(sentences(16), batch_size=4),
        schedule=None,
    )
    assert any(info.updates for info in names["optimizer"].layers())


def test_the_optimizer_of_the_page_around_a_prepared_base():
    accelerate = pytest.importorskip("accelerate")
    names = {"accelerator": accelerate.Accelerator(cpu=True), "model": tiny()}
    names = run(snippet("frameworks.md", "prepared.optimizer"), **names)
    optimizer = names["optimizer"]
    assert optimizer.base is names["prepared"].optimizer
    assert any(info.preconditioned for info in optimizer.layers())


def test_the_module_of_the_page_with_lightning(tmp_path, monkeypatch):
    pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    model = tiny()
    before = [p.detach().clone() for p in model.parameters()]
    text = snippet("frameworks.md", "import lightning")
    text = text.replace("Trainer(", 'Trainer(max_epochs=1, accelerator="cpu", ')
    run(text, model=model, loader=torch.utils.data.DataLoader(sentences(12), batch_size=4))
    assert any(not torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
