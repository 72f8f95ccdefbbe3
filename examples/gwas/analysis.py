"""Finds the variants that are associated with the trait: one linear regression per variant, with Bonferroni correction.

Reads data/genotypes.csv, writes associations.csv and result.json. Needs only Python's standard library.
"""
import argparse
import csv
import json
import math


def regress(x, y):
    """Returns the slope of y on x, its standard error, and the two-sided p-value (normal approximation)."""
    n = len(x)
    mean_x, mean_y = sum(x) / n, sum(y) / n
    sxx = sum((a - mean_x) ** 2 for a in x)
    if sxx == 0:
        return 0.0, math.inf, 1.0
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y)) / sxx
    residual = sum((b - mean_y - slope * (a - mean_x)) ** 2 for a, b in zip(x, y))
    error = math.sqrt(residual / (n - 2) / sxx)
    return slope, error, math.erfc(abs(slope / error) / math.sqrt(2))


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--alpha", type=float, default=0.05, help="family-wise error rate")
options = parser.parse_args()

with open("data/genotypes.csv", newline="") as source:
    rows = list(csv.DictReader(source))
trait = [float(row["trait"]) for row in rows]
variants = [name for name in rows[0] if name.startswith("rs")]

found = []
for variant in variants:
    slope, error, p = regress([float(row[variant]) for row in rows], trait)
    found.append({"variant": variant, "slope": slope, "error": error, "p": p})
found.sort(key=lambda f: f["p"])

with open("associations.csv", "w", newline="") as out:
    table = csv.DictWriter(out, fieldnames=["variant", "slope", "error", "p"])
    table.writeheader()
    table.writerows(found)

hits = [f["variant"] for f in found if f["p"] < options.alpha / len(variants)]
with open("result.json", "w") as out:
    json.dump({"samples": len(rows), "variants": len(variants), "hits": hits, "best": found[0]}, out, indent=2)
    out.write("\n")

print(f"{len(rows)} samples, {len(variants)} variants")
print(f"best: {found[0]['variant']}, slope {found[0]['slope']:.2f}, p = {found[0]['p']:.1e}")
print(f"significant at {options.alpha}: {', '.join(hits) or 'none'}")
