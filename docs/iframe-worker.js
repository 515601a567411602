/* Pages that are opened from the disk (file://) may start no worker, and the search of the site runs in one. Here its script runs in
   a hidden frame of the page, behind the few names of a worker that it uses. */
(function () {
  if (location.protocol !== "file:") return;

  class FrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      this.inner = frame.contentWindow;
      this.inner.postMessage = (data) => {
        const event = new MessageEvent("message", { data: data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      this.inner.importScripts = (...urls) => Promise.all(urls.map((each) => this.load(each)));
      this.load(url).then(() => {
        const waiting = this.waiting;
        this.waiting = null;
        waiting.forEach((data) => this.postMessage(data));
      });
    }

    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.inner.document.createElement("script");
        script.src = url;
        script.onload = resolve;
        script.onerror = () => reject(new Error("cannot load " + url));
        this.inner.document.body.appendChild(script);
      });
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.inner.dispatchEvent(new MessageEvent("message", { data: data }));
    }

    terminate() {}
  }

  window.IFrameWorker = window.Worker = FrameWorker;
})();
