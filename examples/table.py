"""A CSV table with categories and gaps, trained privately end to end: python examples/table.py [clinic.csv]"""

import csv
import io
import random
import sys
from pathlib import Path

from tptopk.integrations.sklearn import TPTopKClassifier

# A made-up clinic's table, unless one is named.
made_up = io.StringIO(newline="")
rows = csv.writer(made_up)
rows.writerow(["age", "dose", "ward", "postcode", "readmitted"])
for _ in range(2000):
    age, dose, ward = random.randint(18, 95), round(random.uniform(0, 5), 1), random.choice(["A", "B", "C"])
    risk = (age - 55) / 20 + (dose - 2.5) + (ward == "C") + random.gauss(0, 0.5)
    rows.writerow([age, dose if random.random() < 0.9 else "", ward, 1000 + age % 7, "yes" if risk > 0 else "no"])

text = Path(sys.argv[1]).read_text(encoding="utf-8") if len(sys.argv) > 1 else made_up.getvalue()
records = list(csv.DictReader(io.StringIO(text)))
columns = ["age", "dose", "ward", "postcode"]
table = [[record[name] for name in columns] for record in records]
labels = [record["readmitted"] for record in records]

# All of this is public knowledge about the table, written down without a look at its records.
classifier = TPTopKClassifier(epsilon=3.0, classes=["no", "yes"], dataset_size=1500, missing=True,
                              bounds={0: (0, 120), 1: (0, 5)}, categories={2: ["A", "B", "C"], 3: 16})  # fmt: skip
classifier.fit(table[:1500], labels[:1500])
print(f"test accuracy {classifier.score(table[1500:], labels[1500:]):.3f} at ε = {classifier.epsilon_:.3f}")
print(classifier.statement())
