// The console, Send and Copy. Everything else on these pages works without a script.
"use strict";

const LOG_LINES = 50; // kept per socket
const UNREACHABLE = "The server cannot be reached.";
const source = document.getElementById("key"); // the field of the console, or a new key
const said = document.getElementById("said");

// Make the response to a form an ordinary page of the history: then Reload (but not WebKit's), Back
// and Forward don't send the form again.
history.replaceState(null, "", location.href);

// Let a form be sent only once, however slow the server is; after Back, it can be sent again. WebKit
// keeps even the pages of an account for Back, and a password that is shown. Load those again: the
// user may have logged out.
addEventListener("submit", ({ target }) => enable(target, target.method !== "post"));
addEventListener("pageshow", ({ persisted }) => {
  enable(document, true);
  if (!persisted || !document.querySelector('[action$="/log-out"], [name="password"]')) return;
  document.body.hidden = true;
  location.replace(location.href.replace(/#.*/, "")); // with an anchor, nothing would be loaded
});

function enable(element, enabled) {
  for (const button of element.querySelectorAll("button")) button.disabled = !enabled;
}

// Take a new key to the console's field. It is stored only until the console has loaded.
document.querySelector("[data-take]")?.addEventListener("click", ({ target }) => {
  sessionStorage.setItem("key", typedKey());
  location = target.dataset.take;
});

for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", () => copy(button));
}

/** Copy the text of the element that the button names, and say how it went. */
async function copy(button) {
  const turn = (said.turn = {});
  said.textContent = ""; // otherwise, the same words would not be read aloud again
  const element = document.getElementById(button.dataset.copy);
  const written = navigator.clipboard?.writeText(element.textContent);
  const copied = (await written?.then(() => true, () => false)) || copySelected(element);
  button.textContent = copied ? "Copied" : "Selected";
  said.textContent = copied ? "Copied" : "The text is selected. Copy it.";
  setTimeout(() => {
    button.textContent = "Copy";
    if (said.turn === turn) said.textContent = "";
  }, 2000);
}

/** Without https, browsers have no clipboard, but most still have this command. */
function copySelected(element) {
  const write = (event) => {
    event.clipboardData.setData("text/plain", element.textContent); // a hidden key would be dots
    event.preventDefault();
  };
  getSelection().selectAllChildren(element); // only here: screen readers read a selection aloud
  document.addEventListener("copy", write);
  const copied = document.execCommand("copy");
  document.removeEventListener("copy", write);
  return copied;
}

function typedKey() {
  return source.value.trim();
}

/** Ask the API for an entry; no answer comes if another click has changed the entry meanwhile. */
async function call(entry, path) {
  const { turn } = entry;
  const answer = await ask(entry, path);
  return entry.turn === turn ? answer : new Promise(() => {}); // which never resolves
}

/** Ask the API, with the key of the page unless the entry is public; never fails. */
async function ask(entry, path) {
  const key = "public" in entry.dataset ? "" : typedKey();
  const started = performance.now();
  if (/[^\x20-\x7e]/.test(key)) return { advice: "This is not an API key.", needsKey: true };
  const headers = key ? { "X-API-Key": key } : {};
  try {
    const response = await fetch(path, { headers, credentials: "omit", cache: "no-store" });
    const text = await response.text();
    const took = `${Math.round(performance.now() - started)} ms`;
    const title = response.ok ? response.statusText || "OK" : parse(text)?.title ?? response.statusText;
    if (key === typedKey()) showAllowance(response.headers);
    const status = `${response.status} ${title}`;
    const needsKey = response.status === 401;
    return { response, text, status, took, needsKey, advice: response.ok ? "" : adviceOn(response, text) };
  } catch {
    return { advice: UNREACHABLE };
  }
}

/** One sentence about what is wrong. */
function adviceOn(response, text) {
  const { code, detail = "This response is not from the API." } = parse(text) ?? {};
  const wait = response.headers.get("Retry-After");
  if (code === "missing_api_key") return "This endpoint needs a key.";
  return wait > 0 ? `${detail} Try again in ${duration(wait)}.` : detail; // a proxy may send a date
}

/** In words: "45 s", "37 min", or "2 h 37 min". */
function duration(seconds) {
  const minutes = Math.ceil(seconds / 60);
  if (seconds < 120) return `${seconds} s`;
  if (minutes < 60) return `${minutes} min`;
  return `${Math.floor(minutes / 60)} h${minutes % 60 ? ` ${minutes % 60} min` : ""}`;
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

/** Call the endpoint of an entry and show the response. */
async function send(entry) {
  reveal(entry);
  mark(entry, "Waiting…");
  show(entry, await call(entry, entry.dataset.path));
}

/** Make room for a response: in an entry of the console, or on the page of a new key. */
function reveal(entry) {
  const details = entry.querySelector(":scope > details");
  if (details) details.open = true;
  entry.querySelector(".response").hidden = false;
}

/** Say how it went, and, where a key is missing, how to get one. */
function mark(entry, words, { mood = "", took = "", advice = "", needsKey = false } = {}) {
  const [chip, time, sentence] = [".chip", ".took", ".advice"].map((name) => entry.querySelector(name));
  const ways = needsKey && document.getElementById("ways");
  entry.turn = {}; // so `call` gives no answer to an earlier click
  chip.textContent = words;
  chip.className = `chip ${mood}`;
  if (time) time.textContent = took;
  sentence.replaceChildren(advice, ...(ways ? [" ", ways.content.cloneNode(true)] : []));
}

function show(entry, { response, text = "", status = "No response", ...how }) {
  const find = (name) => entry.querySelector(`.response ${name}`);
  const headers = [...(response?.headers ?? [])].map(([name, value]) => `${name}: ${value}\n`);
  mark(entry, status, { ...how, mood: response?.ok ? "good" : "bad" });
  find(".body code").textContent = parse(text) ? JSON.stringify(parse(text), null, 2) : text;
  find(".body").hidden = !text;
  find(".headers").textContent = headers.join("");
  find("details").hidden = !headers.length;
  colour();
}

/** Show what is left of the key's limit, if the headers say so, until the window ends. */
function showAllowance(headers) {
  const [limit, left] = ["limit", "remaining"].map((n) => Number(headers.get(`x-ratelimit-${n}`)));
  const line = document.querySelector(".allowance");
  if (!limit || !line) return;
  const [meter, words] = line.children;
  const [, tier, seconds] = /"(.+)".*w=([0-9]+)/.exec(headers.get("ratelimit-policy"));
  const unit = JSON.parse(line.dataset.units)[seconds];
  // Amber from 20 % on, red at 0 %.
  Object.assign(meter, { max: limit, low: 0.5, high: limit * 0.2 + 0.5, optimum: limit, value: left });
  const [some, all] = [left, limit].map((number) => number.toLocaleString("en"));
  words.textContent = `${tier}: ${some} of ${all} left ${unit === "day" ? "today" : `this ${unit}`}`;
  line.hidden = false;
  const [, secondsLeft] = /t=([0-9]+)/.exec(headers.get("ratelimit"));
  clearTimeout(line.end);
  line.end = setTimeout(() => (line.hidden = true), secondsLeft * 1000);
}

const TOKEN = new RegExp(
  [
    String.raw`(?<name>"[^"\n]*"(?=\s*:)|\b(?:import|from|with|as|for|in|const|new|await)\b|(?<=\s)--?[A-Za-z]\w*)`,
    String.raw`(?<string>"[^"]*")`,
    String.raw`(?<value>(?<![\w./:-])(?:true|false|null|[0-9][0-9.]*)\b)`,
  ].join("|"),
  "g",
);

/** Colour code and JSON in place: the elements, and so what is copied or read aloud, stay as they are. */
function colour() {
  // In forced colours, all of it would look selected.
  if (!CSS.highlights || matchMedia("(forced-colors: active)").matches) return;
  const found = { name: new Highlight(), string: new Highlight(), value: new Highlight() };
  for (const element of document.querySelectorAll("pre:not(.headers)")) {
    const nodes = textNodes(element);
    for (const { index, 0: text, groups } of element.textContent.matchAll(TOKEN)) {
      const range = new Range();
      range.setStart(...locate(nodes, index));
      range.setEnd(...locate(nodes, index + text.length));
      found[Object.keys(groups).find((kind) => groups[kind])].add(range);
    }
  }
  for (const [kind, ranges] of Object.entries(found)) CSS.highlights.set(kind, ranges);
}

function textNodes(element) {
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  const nodes = [];
  while (walker.nextNode()) nodes.push(walker.currentNode);
  return nodes;
}

/** The node that has this character of a text, and where in it. */
function locate(nodes, offset) {
  for (const node of nodes) {
    if (offset <= node.length) return [node, offset];
    offset -= node.length;
  }
}

/** One WebSocket's entry: connect, disconnect, send, and a log of the messages. */
class SocketEntry {
  constructor(entry) {
    this.entry = entry;
    this.button = entry.querySelector("[data-connect]");
    this.log = entry.querySelector(".log");
    this.clock = entry.querySelector(".clock");
    this.button.addEventListener("click", () => (this.socket ? this.leave() : this.connect()));
    entry.querySelector("form")?.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send(event.target.querySelector("input").value);
    });
  }

  connect() {
    const query = "public" in this.entry.dataset ? "" : `?api_key=${encodeURIComponent(typedKey())}`;
    // Browsers of 2023 need the whole address: wss, if the page came by https.
    const address = location.origin.replace("http", "ws") + this.entry.dataset.path + query;
    this.log.replaceChildren();
    this.log.hidden = true;
    this.opened = false;
    reveal(this.entry);
    this.say("Connecting…", "Cancel");
    this.socket = new WebSocket(address);
    this.socket.onopen = () => {
      this.opened = true;
      this.say("Connected", "Disconnect", { mood: "good" });
    };
    this.socket.onmessage = ({ data }) => this.receive(data);
    this.socket.onclose = (event) => this.closed(event);
  }

  /** Close from this side; there is nothing to explain. */
  leave() {
    this.socket.onclose = this.socket.onmessage = null;
    this.socket.close();
    this.end(this.opened ? "Disconnected" : "Not connected");
  }

  send(text) {
    if (!this.socket) this.connect();
    const { socket } = this;
    const deliver = () => {
      socket.send(text);
      this.note(text, "out");
    };
    if (this.opened) deliver();
    else socket.addEventListener("open", deliver, { once: true });
  }

  receive(data) {
    this.note(data, "in");
    const time = parse(data)?.formatted;
    if (!this.clock || !time) return;
    this.clock.hidden = false;
    this.clock.textContent = time;
    this.clock.classList.toggle("tick"); // starts the other one of two equal animations
  }

  closed({ code, reason }) {
    if (!this.opened) return this.refused();
    const meaning = document.getElementById(`close-${code}`)?.textContent.replace(/\.$/, "");
    const advice = `${reason || meaning || "The server closed the connection"} (${code})`;
    this.end("Closed", { mood: "bad", advice });
  }

  /** A browser doesn't say why a socket was refused, so ask the REST API. */
  async refused() {
    this.end("Refused");
    const { advice, needsKey } = await call(this.entry, this.entry.dataset.check);
    const full = "Too many sockets are open. Close one and try again. If you have none, the server is full, "
      + "or a proxy blocks WebSockets.";
    this.end("Refused", { mood: "bad", advice: advice || full, needsKey });
  }

  end(words, how) {
    this.socket = null;
    this.opened = false;
    if (this.clock) this.clock.hidden = true;
    this.say(words, "Connect", how);
  }

  say(words, action, how) {
    mark(this.entry, words, how);
    this.button.textContent = action;
  }

  /** Add a line to the log, and scroll to it unless the user has scrolled up. */
  note(text, direction) {
    const { log } = this;
    const atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 10;
    const entry = document.createElement("p");
    entry.className = direction;
    entry.textContent = text;
    log.hidden = false;
    log.append(entry);
    while (log.childElementCount > LOG_LINES) log.firstElementChild.remove();
    if (atEnd) log.scrollTop = log.scrollHeight;
  }
}

for (const button of document.querySelectorAll("[data-send]")) {
  button.addEventListener("click", () => send(button.closest("[data-path]")));
}
for (const entry of document.querySelectorAll(".socket")) new SocketEntry(entry);
for (const entry of document.querySelectorAll("[data-live]")) send(entry);
source?.addEventListener("focus", () => source.select()); // to copy it, or to replace it

const environment = document.getElementById("environment"); // on the console only
const NAMED = /\$KEY"|os\.environ\["KEY"\]|process\.env\.KEY/g;
const examples = environment ? [...document.querySelectorAll("[data-language] code")] : [];
const originals = examples.map((code) => code.innerHTML);

/** Put the key from the field into the code, where it is hidden as long as in the field. */
function fillIn() {
  const key = /^\w+$/.test(typedKey()) ? typedKey() : ""; // nothing that is HTML, or that a shell would run
  // With the closing quote, which would otherwise be alone on a line of a narrow page.
  const secret = `<span class="secret">${key}<span class="quote">"</span></span>`;
  const written = (name) => (name === '$KEY"' ? secret : `"${secret}`);
  environment.hidden = key !== "";
  for (const [index, code] of examples.entries()) {
    const filled = originals[index].replace("import os\n", "").replace(NAMED, written);
    code.innerHTML = key ? filled : originals[index];
  }
  colour();
}

/** What `data-take` has stored; nothing in a browser that stores nothing for this site. */
function takenKey() {
  try {
    const key = sessionStorage.getItem("key");
    sessionStorage.removeItem("key");
    return key;
  } catch {
    return null;
  }
}

if (environment) {
  source.value = takenKey() ?? source.value;
  source.addEventListener("input", () => {
    fillIn();
    document.querySelector(".allowance").hidden = true; // it is another key's
  });
  fillIn(); // a browser may have kept what was typed
}
colour();

for (const button of document.querySelectorAll("[data-show]")) {
  const input = document.getElementById(button.dataset.show);
  button.addEventListener("click", () => {
    button.ariaPressed = button.ariaPressed === "false";
    if (input !== source) input.type = button.ariaPressed === "true" ? "text" : "password";
  });
}
