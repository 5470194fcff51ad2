// Searches a built site as its own page does: node search.js SITE QUERY...
const fs = require("fs");
const vm = require("vm");

const [site, ...queries] = process.argv.slice(2);
const page = {
  addEventListener() {},
  documentElement: { dataset: {} },
  getElementById: () => null,
  querySelector: () => null,
};
const here = {
  DOCUMENTATION_OPTIONS: {},
  SPHINX_HIGHLIGHT_ENABLED: false,
  _: (text) => text,
  _ready() {},
  document: page,
  localStorage: { setItem() {} },
  queries,
};
here.window = vm.createContext(here);
for (const name of ["_static/language_data.js", "_static/searchtools.js", "searchindex.js"])
  vm.runInContext(fs.readFileSync(`${site}/${name}`, "utf8"), here);
const find = "(q) => Search._performSearch(...Search._parseQuery(q)).reverse()";
const found = vm.runInContext(`queries.map(${find})`, here);
console.log(JSON.stringify(found.map((hits) => hits.map((hit) => hit[0]))));
