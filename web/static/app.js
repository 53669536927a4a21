// The console, Try it and Copy. Everything else on these pages works without a script.
"use strict";

const LOG_LINES = 50; // kept per socket
const UNREACHABLE = "The server cannot be reached.";
const source = document.getElementById("key"); // the field of the console, or a new key
const said = document.getElementById("said");

// Make the response to a form an ordinary page of the history: then Reload (but not WebKit's), Back
// and Forward don't send the form again.
history.replaceState(null, "", location.href);

// Let a form be sent only once, however slow the server is; after Back, it can be sent again. WebKit
// keeps even the pages of an account for Back. Load those again: the user may have logged out.
addEventListener("submit", ({ target }) => enable(target, target.method !== "post"));
addEventListener("pageshow", ({ persisted }) => {
  enable(document, true);
  if (!persisted || !document.querySelector('[action$="/log-out"]')) return;
  document.body.hidden = true;
  location.replace(location.href);
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
  const element = document.getElementById(button.dataset.copy);
  const written = navigator.clipboard?.writeText(element.textContent);
  const copied = (await written?.then(() => true, () => false)) || copySelected(element);
  button.textContent = copied ? "Copied" : "Selected";
  said.textContent = copied ? "Copied" : "The text is selected. Copy it.";
  setTimeout(() => (button.textContent = "Copy", said.textContent = ""), 2000);
}

/** Without https, browsers have no clipboard, but most still have this command. */
function copySelected(element) {
  getSelection().selectAllChildren(element); // only here: screen readers read a selection aloud
  return document.execCommand("copy");
}

function typedKey() {
  return (source.value ?? source.textContent).trim();
}

/** Ask the API, with the key of the page unless the card is public; never fails. */
async function call(card, path) {
  const key = "public" in card.dataset ? "" : typedKey();
  const started = performance.now();
  if (/[^\x20-\x7e]/.test(key)) return { advice: "This is not an API key." };
  const headers = key ? { "X-API-Key": key } : {};
  try {
    const response = await fetch(path, { headers, credentials: "omit", cache: "no-store" });
    const text = await response.text();
    const milliseconds = Math.round(performance.now() - started);
    const title = response.ok ? "OK" : parse(text)?.title ?? response.statusText;
    const status = `${response.status} ${title}, ${milliseconds} ms`;
    return { response, text, status, advice: response.ok ? "" : adviceOn(response, text) };
  } catch {
    return { advice: UNREACHABLE };
  }
}

/** One sentence about what is wrong. */
function adviceOn(response, text) {
  const { code, detail = "This response is not from the API." } = parse(text) ?? {};
  const wait = response.headers.get("Retry-After");
  if (code === "missing_api_key") return "Enter an API key first.";
  return wait ? `${detail} Try again in ${duration(wait)}.` : detail;
}

/** As the pages write it: "45 s", "37 min", or "2 h 37 min". */
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

/** Call the endpoint of a card and show the response; of two clicks, the later one counts. */
async function tryIt(card) {
  const turn = (card.turn = {});
  show(card, { status: "Waiting for the response…" });
  const result = await call(card, card.dataset.path);
  if (card.turn === turn) show(card, result);
}

function show(card, { response, text = "", status = "No response", advice = "" }) {
  const find = (name) => card.querySelector(`.response ${name}`);
  const headers = [...(response?.headers ?? [])].map(([name, value]) => `${name}: ${value}\n`);
  find(".status").textContent = status;
  find(".status").className = `status ${response?.ok ? "good" : advice && "bad"}`;
  find(".advice").textContent = advice;
  find(".body").textContent = parse(text) ? JSON.stringify(parse(text), null, 2) : text;
  find(".body").hidden = !text;
  find(".headers").textContent = headers.join("");
  find("details").hidden = !headers.length;
  showAllowance(find(".allowance"), response?.headers);
  card.querySelector(".response").hidden = false;
}

/** Draw the limit headers, if there are any. */
function showAllowance(line, headers) {
  const [limit, left] = ["limit", "remaining"].map((n) => Number(headers?.get(`x-ratelimit-${n}`) ?? 0));
  const [meter, words] = line.children;
  const unit = JSON.parse(line.dataset.units)[/w=([0-9]+)/.exec(headers?.get("ratelimit-policy"))?.[1]];
  // Amber from 80 %, red at 100 %.
  Object.assign(meter, { max: limit, low: limit * 0.8 - 0.5, high: limit - 0.5, optimum: 0, value: limit - left });
  const [used, all] = [limit - left, limit].map((number) => number.toLocaleString("en"));
  words.textContent = `${used} of ${all} requests used ${unit === "day" ? "today" : `this ${unit}`}`;
  line.hidden = !limit;
}

/** One WebSocket's card: connect, disconnect, send, and a log of the messages. */
class SocketCard {
  constructor(card) {
    this.card = card;
    this.button = card.querySelector("[data-connect]");
    this.status = card.querySelector(".status");
    this.log = card.querySelector(".log");
    this.clock = card.querySelector(".clock");
    this.button.addEventListener("click", () => (this.socket ? this.leave() : this.connect()));
    card.querySelector("form")?.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send(event.target.querySelector("input").value);
    });
  }

  connect() {
    const query = "public" in this.card.dataset ? "" : `?api_key=${encodeURIComponent(typedKey())}`;
    const address = location.origin.replace("http", "ws") + this.card.dataset.path + query;
    this.log.replaceChildren();
    this.log.hidden = true;
    this.opened = false;
    this.say("Connecting…", "Cancel");
    this.socket = new WebSocket(address);
    this.socket.onopen = () => {
      this.opened = true;
      this.say("Connected", "Disconnect", "good");
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
    const meaning = document.getElementById(`close-${code}`)?.textContent;
    this.end(`${reason || meaning || "The server closed the connection"} (${code})`, "bad");
  }

  /** A browser doesn't say why a socket was refused, so ask the REST API. */
  async refused() {
    this.end("Finding out what is wrong…");
    const { advice } = await call(this.card, this.card.dataset.check);
    if (this.socket) return; // the user has clicked again
    this.end(advice || "Too many sockets are open. Close one and try again.", "bad");
  }

  end(words, mood = "") {
    this.socket = null;
    this.opened = false;
    if (this.clock) this.clock.hidden = true;
    this.say(words, "Connect", mood);
  }

  say(words, action, mood = "") {
    this.status.textContent = words;
    this.status.className = `status needs-script ${mood}`;
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

for (const card of document.querySelectorAll(".endpoint")) {
  card.querySelector("[data-try]").addEventListener("click", () => tryIt(card));
}
for (const card of document.querySelectorAll(".socket")) new SocketCard(card);

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
}

if (environment) {
  source.value = sessionStorage.getItem("key") ?? source.value;
  sessionStorage.removeItem("key");
  source.addEventListener("input", fillIn);
  fillIn(); // a browser may have kept what was typed
}

for (const button of document.querySelectorAll("[data-show]")) {
  const input = document.getElementById(button.dataset.show);
  button.addEventListener("click", () => {
    input.type = input.type === "password" ? "text" : "password";
    button.ariaPressed = input.type === "text";
  });
}
