"""Fine-tune MiniLM in a loop with Accelerate, with MKOR around AdamW: accumulation and clipping.

Needs `pip install 'mkor[frameworks]'`, and MKOR_DATA (see polarity.py). A script that was called
accelerate.py would hide the package of that name.
"""

import torch
from accelerate import Accelerator
from polarity import encoded, minilm
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

import mkor

torch.set_num_threads(1)
model, tokenizer = minilm()
loader = DataLoader(
    encoded("train", 384, tokenizer),
    batch_size=8,
    collate_fn=lambda rows: tokenizer.pad(rows, return_tensors="pt"),
)
mkor_optimizer = mkor.MKOR(model, torch.optim.AdamW(model.parameters(), lr=3e-4))
schedule = get_linear_schedule_with_warmup(mkor_optimizer, 4, len(loader) // 2)

accelerator = Accelerator(gradient_accumulation_steps=2)
model, optimizer, loader, schedule = accelerator.prepare(model, mkor_optimizer, loader, schedule)

recent = []
for number, batch in enumerate(loader, start=1):
    with accelerator.accumulate(model):
        mkor_optimizer.set_mask(batch["attention_mask"])  # the prepared one has no such method
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    recent.append(loss.item())
    if number % 12 == 0:
        print(f"batch {number:3d}  loss {sum(recent) / len(recent):.4f}")
        recent.clear()

model.eval()
with torch.no_grad():
    batch = tokenizer.pad(encoded("test", 200, tokenizer), return_tensors="pt")
    batch = {key: value.to(accelerator.device) for key, value in batch.items()}
    hits = model(**batch)["logits"].argmax(dim=1) == batch["labels"]
print(f"accuracy {hits.float().mean().item():.3f}")
