"""A small transformer of Hugging Face's, from random weights, trained privately on text: python examples/hugging_face_loop.py

Sixty sentences are far too few to learn much from privately; put your own in their place. No training loss is logged, since
none is computed; the run folder holds checkpoints, and `tptopk verify` checks it.
"""

import sys
import zlib

import torch
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification

import tptopk

TEXT = """
+ the nurse was kind and patient        - nobody answered the bell all night
+ a clean and quiet ward                - the room was cold and dirty
+ everything was explained to me        - nothing was explained at all
+ i felt safe the whole time            - i felt lost and afraid
+ the food was better than at home      - the food was cold again
+ quick help when i needed it           - we waited five hours for help
+ the doctor listened carefully         - the doctor never listened
+ thank you for the wonderful care      - i will never come back here
+ a friendly voice every morning        - a rude voice every morning
+ my pain was taken seriously           - my pain was ignored for days
+ the staff found my lost ring          - the staff lost my ring
+ easy to find and easy to reach        - impossible to find and no parking
+ they called me back the same day      - they never called me back
+ warm blankets and a warm welcome      - thin blankets and a cold welcome
+ the new treatment worked well         - the treatment made it worse
+ great team and good humour            - bad team and no humour
+ my daughter loved the playroom        - my daughter cried all day
+ the surgeon was calm and clear        - the surgeon was late and unclear
+ no waiting and no paperwork           - endless waiting and endless paperwork
+ they kept every promise               - they broke every promise
+ good advice for going home            - sent home without any advice
+ the bed was comfortable               - the bed was broken
+ i slept well for once                 - i could not sleep for the noise
+ a very gentle examination             - a very rough examination
+ clear answers to all questions        - no answers to any question
+ i would recommend this clinic         - i would warn everyone of this clinic
+ the garden lifted my spirits          - the corridor smelled of smoke
+ excellent care from start to end      - poor care from start to end
+ they remembered my name               - they mixed up my name
+ the tablets helped at once            - the tablets did not help
"""
LENGTH, WORDS = 10, 512
sentences = [part.strip() for line in TEXT.strip().splitlines() for part in (line[:40], line[40:])]
labels = torch.tensor([int(sentence[0] == "+") for sentence in sentences])


def tokens(sentence: str) -> list[int]:
    """Words by a fixed hash, 0 for padding: a vocabulary made from the records would tell of them."""
    found = [1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in sentence.split()[1 : LENGTH + 1]]
    return found + [0] * (LENGTH - len(found))


def loss(model, batch):
    """One loss a record, [B]. Positions are given for each record: by itself the model makes them once for the batch."""
    ids, targets = batch  # [B, T], [B]
    positions = torch.arange(LENGTH, device=ids.device).expand_as(ids)
    logits = model(
        input_ids=ids, attention_mask=ids.ne(0).long(), position_ids=positions, token_type_ids=torch.zeros_like(ids)
    ).logits
    return F.cross_entropy(logits, targets, reduction="none")


ids = torch.tensor([tokens(sentence) for sentence in sentences])
model = BertForSequenceClassification(
    BertConfig(vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
               max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
)  # fmt: skip
folder = sys.argv[1] if len(sys.argv) > 1 else "runs/hugging-face"
plan = tptopk.Plan.calibrate("tp-topk", epsilon=8.0, delta=1e-3, batch_size=20, dataset_size=60, epochs=10)
run = tptopk.fit(model, (ids, labels), plan, torch.optim.AdamW(model.parameters(), lr=2e-3), loss=loss,
                 out=folder, checkpoint_every=10)  # after a crash: the same with resume=True  # fmt: skip
model.save_pretrained(f"{folder}/hugging-face")
print(f"{len(run.history)} steps at ε = {run.epsilon:.3f}, δ = {run.delta:g}, by the {run.engine} engine")
print(run.statement())
