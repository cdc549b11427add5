// Curves by uPlot: the small ones in the figures, and the large one of the whole job.
class Spark {
  constructor(place) {
    this.place = place;
    this.plot = null;
  }

  draw([times, values], { zero = false } = {}) {
    const colour = css("accent");
    if (values.length < 2) return;
    const width = this.place.clientWidth;
    if (!this.plot || this.colour !== colour) {
      this.plot?.destroy();
      this.colour = colour;
      const range = (_, least, most) => {
        const low = zero ? Math.min(0, least) : least;
        return most > low ? [low, most + 0.05 * (most - low)] : [low - 1, low + 1];
      };
      const options = {
        width,
        height: 30,
        padding: [2, 0, 2, 0],
        legend: { show: false },
        cursor: { show: false },
        select: { show: false },
        axes: [{ show: false }, { show: false }],
        scales: { x: { time: false }, y: { range } },
        series: [{}, { stroke: colour, width: 1.5, points: { show: false } }],
      };
      this.plot = new uPlot(options, [times, values], this.place);
    } else {
      if (this.plot.width !== width) this.plot.setSize({ width, height: 30 });
      this.plot.setData([times, values]);
    }
  }
}

// The curve of one figure over the whole job: the mean, in a band from the least to the most.
function large(place, { t, least, mean, most }, name) {
  place.replaceChildren();
  const axis = { stroke: css("mute"), grid: { stroke: css("line"), width: 1 }, ticks: { stroke: css("line") }, font: "12px system-ui" };
  const stroke = css("accent");
  const options = {
    width: place.clientWidth,
    height: 230,
    cursor: { y: false },
    legend: { show: false },
    scales: { x: { time: false } },
    axes: [
      { ...axis, values: (_, ticks) => ticks.map((tick) => `${tick} s`) },
      { ...axis, size: 70, values: (_, ticks) => ticks.map((tick) => figure(tick)) },
    ],
    series: [
      {},
      { label: "least", stroke: "transparent", points: { show: false } },
      { label: name, stroke, width: 2, points: { show: t.length < 3 } },
      { label: "most", stroke: "transparent", points: { show: false } },
    ],
    bands: [{ series: [3, 1], fill: `${stroke}33` }],
  };
  return new uPlot(options, [t, least, mean, most], place);
}
