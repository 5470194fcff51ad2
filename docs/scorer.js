// Pages on what to do come before those on how it works, and these before decisions,
// other systems, and what has changed: each of these names everything once.
var Scorer = {
  score: (result) => {
    const [page, , , , score] = result;
    if (/^(decisions\/|changelog$|coming-from|capabilities$)/.test(page)) return score - 20;
    if (/^(architecture|how-it-works|performance|scaling|simulator|testing|index)$/.test(page)) return score - 8;
    // Short answers, with links to the others.
    return page === "how-to" ? score + 3 : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
